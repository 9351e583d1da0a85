"""Bodies of requests: read whole or not at all, and strictly."""

import json
from typing import Any

from flask import Request
from marshmallow import Schema, ValidationError
from werkzeug.exceptions import BadRequest, RequestEntityTooLarge, UnsupportedMediaType

from memgw.problems import ValidationFailed


def read(request: Request, schema: Schema) -> dict[str, Any]:
    """The request's JSON body as `schema` wants it.

    Raises UnsupportedMediaType (415), BadRequest (400), RequestEntityTooLarge (413) and ValidationFailed (422).
    """
    require_json(request)
    return load(parse(whole(request)), schema)


def require_json(request: Request) -> None:
    """Raises UnsupportedMediaType (415)."""
    charset = request.mimetype_params.get("charset", "utf-8").lower()
    if request.mimetype != "application/json" or charset not in ("utf-8", "utf8") or request.content_encoding:
        raise UnsupportedMediaType("send application/json in UTF-8, without a content encoding")


def whole(request: Request, most: int | None = None) -> bytes:
    """The body as it was sent. Raises RequestEntityTooLarge (413) for one of more than `most` bytes, if that is given,
    else of more than the application takes."""
    if most is not None:
        request.max_content_length = most + 1
    raw = request.get_data(cache=False)
    limit = request.max_content_length
    if limit and len(raw) >= limit:  # werkzeug cuts a body without Content-Length there, silently
        raise RequestEntityTooLarge
    return raw


def parse(raw: bytes) -> dict[str, Any]:
    """A JSON object. Raises BadRequest (400) and ValidationFailed (422)."""
    try:
        data = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        raise BadRequest("the body is not valid JSON in UTF-8, or too deeply nested") from None
    if not isinstance(data, dict):
        raise ValidationFailed({"body": ["Must be a JSON object."]})
    return data


def load(data: dict[str, Any], schema: Schema) -> dict[str, Any]:
    """`data` as `schema` wants it. Raises ValidationFailed (422)."""
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
