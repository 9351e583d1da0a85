"""What goes in and out over HTTP. Requests are strict: no unknown field, no converted type."""

import json
import re
from typing import Any

from flask import Request
from marshmallow import RAISE, Schema, ValidationError, fields, validate
from werkzeug.exceptions import BadRequest, RequestEntityTooLarge, UnsupportedMediaType

from memgw.engine import QueryType
from memgw.problems import ValidationFailed

MAX_QUERY = 1024


class Text(fields.String):
    """Text that can be handed to a process: valid Unicode, no NUL, not blank."""

    def _deserialize(self, value: Any, *args: Any, **kwargs: Any) -> str:
        text = super()._deserialize(value, *args, **kwargs)
        if not text.strip():
            raise ValidationError("Must not be blank.")
        if "\0" in text:
            raise ValidationError("Must not contain NUL.")
        if re.search("[\ud800-\udfff]", text):
            raise ValidationError("Must be valid Unicode.")
        return text


class Name(fields.String):
    """A branch or a profile; what it may hold is the domain's to say."""


class WholeNumber(fields.Integer):
    """A JSON number without a fraction, no string and no boolean."""

    def _deserialize(self, value: Any, *args: Any, **kwargs: Any) -> int:
        if type(value) is not int:
            raise self.make_error("invalid")
        return value


class Number(fields.Float):
    """A JSON number, no string and no boolean."""

    def _deserialize(self, value: Any, *args: Any, **kwargs: Any) -> float:
        if type(value) not in (int, float):
            raise self.make_error("invalid")
        try:
            return float(value)
        except OverflowError as exc:
            raise self.make_error("too_large") from exc


class Flag(fields.Boolean):
    """true or false, nothing that reads like one."""

    def _deserialize(self, value: Any, *args: Any, **kwargs: Any) -> bool:
        if type(value) is not bool:
            raise self.make_error("invalid")
        return value


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
        required=True,
        validate=validate.Length(max=MAX_QUERY),
        **_doc('Words are joined by AND; "…" is a phrase, -word excludes.'),
    )
    query_type = fields.String(
        load_default="search",
        validate=validate.OneOf([str(kind) for kind in QueryType]),
        **_doc("How to search."),
    )
    require_latest = Flag(load_default=True, **_doc("Ask the remote first; false: answer from what is here."))
    limit = WholeNumber(load_default=10, validate=validate.Range(1, 50), **_doc("Most results."))
    min_score = Number(load_default=0.0, validate=validate.Range(0, 1), **_doc("Leave out results below."))
    full = Flag(load_default=False, **_doc("Adds the whole text of each result as body."))


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


class ErrorOut(Schema):
    at = fields.String(required=True)
    code = fields.String(required=True)
    detail = fields.String(required=True)


class WorkspaceOut(Schema):
    workspace = fields.String(required=True)
    branch = fields.String(required=True)
    commit = fields.String(required=True, allow_none=True)
    indexed_commit = fields.String(required=True, allow_none=True)
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


class MirrorOut(Schema):
    remote = fields.String(required=True, **_doc("Without user, password and token."))
    bytes = fields.Integer(required=True)


class StatusOut(Schema):
    """The state of the gateway."""

    ok = fields.Boolean(required=True)
    default_branch = fields.String(required=True)
    versions = fields.Nested(VersionsOut, required=True)
    mirror = fields.Nested(MirrorOut, required=True)
    workspaces = fields.List(fields.Nested(WorkspaceOut), required=True)


class HealthOut(Schema):
    """The process answers."""

    ok = fields.Boolean(required=True)


class ProblemOut(Schema):
    """Every failure (RFC 9457)."""

    ok = fields.Boolean(required=True)
    status = fields.Integer(required=True)
    code = fields.String(required=True)
    title = fields.String(required=True)
    detail = fields.String(required=True)
    request_id = fields.String(required=True)
    errors = fields.Dict(fields.String(), fields.List(fields.String()), **_doc("Field → what is wrong with it."))


def read(request: Request, schema: Schema) -> dict[str, Any]:
    """The request's JSON body as `schema` wants it.

    Raises UnsupportedMediaType (415), BadRequest (400), RequestEntityTooLarge (413) and ValidationFailed (422).
    """
    charset = request.mimetype_params.get("charset", "utf-8").lower()
    if request.mimetype != "application/json" or charset not in ("utf-8", "utf8") or request.content_encoding:
        raise UnsupportedMediaType("send application/json in UTF-8, without a content encoding")
    raw = request.get_data(cache=False)
    limit = request.max_content_length
    if limit and len(raw) >= limit:  # werkzeug cuts a body without Content-Length there, silently
        raise RequestEntityTooLarge
    try:
        data = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        raise BadRequest("the body is not valid JSON in UTF-8, or too deeply nested") from None
    if not isinstance(data, dict):
        raise ValidationFailed({"body": ["Must be a JSON object."]})
    try:
        loaded: dict[str, Any] = schema.load(data)
    except ValidationError as exc:
        found = exc.messages_dict.items()
        raise ValidationFailed({_shown(str(key)): _messages(value) for key, value in found}) from None
    return loaded


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose key comes twice means two things at once."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key comes twice")
    return found


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _messages(value: Any) -> list[str]:
    return [str(item) for item in value] if isinstance(value, list) else [str(value)]


def _shown(key: str) -> str:
    """A client's own key, made harmless to print."""
    return key.encode("utf-8", "replace").decode()[:64]
