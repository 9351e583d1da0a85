"""The OpenAPI document, made from the schemas that the views use."""

from collections.abc import Mapping
from functools import cache
from typing import Any

from apispec import APISpec
from apispec.ext.marshmallow import MarshmallowPlugin
from marshmallow import Schema

from memgw import __version__
from memgw.problems import CODES
from memgw.schemas import (
    AnswerOut,
    HealthOut,
    HookOut,
    ProblemOut,
    PushIn,
    QueryIn,
    ReadyOut,
    SelectionIn,
    StatusOut,
    SyncOut,
)

_BODY = (400, 413, 415, 422)
_WORK = (404, 500, 502, 503, 504, 507)
_HOOK = (401, 404, 409, 500, 503, 507)


@cache
def document() -> dict[str, Any]:
    """OpenAPI 3.1 of all endpoints."""
    spec = APISpec(
        title="memgw",
        version=__version__,
        openapi_version="3.1.0",
        plugins=[MarshmallowPlugin()],
        info={"description": "A team's memory in Git, searched at its newest commit."},
    )
    _add(spec, "/query", "post", "Search a branch at its newest commit", AnswerOut(), QueryIn(), _BODY + _WORK)
    _add(spec, "/sync", "post", "Bring a branch to its newest commit", SyncOut(), SelectionIn(), _BODY + _WORK)
    taken = {"202": _content("application/json", HookOut(), "Taken, or left alone")}
    _add(spec, "/hooks/push", "post", "A forge tells of a push, signed", None, PushIn(), _BODY + _HOOK, taken)
    _add(spec, "/status", "get", "The state of the gateway and its workspaces", StatusOut(), None, (500,))
    _add(spec, "/health", "get", "The process answers", HealthOut(), None, ())
    not_now = {"503": _content("application/json", ReadyOut(), "Not now, and why")}
    _add(spec, "/ready", "get", "Whether questions can be answered now", ReadyOut(), None, (500,), not_now)
    spec.path(
        "/metrics",
        operations={
            "get": {
                "summary": "What was counted, for Prometheus",
                "operationId": "metrics",
                "responses": {
                    "200": {"description": "Done", "content": {"text/plain": {"schema": {"type": "string"}}}}
                },
            }
        },
    )
    spec.path(
        "/openapi.json",
        operations={"get": {"summary": "This document", "responses": {"200": {"description": "OpenAPI"}}}},
    )
    return spec.to_dict()


def _add(
    spec: APISpec,
    path: str,
    method: str,
    summary: str,
    out: Schema | None,
    body: Schema | None,
    failures: tuple[int, ...],
    more: Mapping[str, Any] | None = None,
) -> None:
    answers: dict[str, Any] = {"200": _content("application/json", out, "Done")} if out else {}
    for status in failures:
        answers[str(status)] = _content("application/problem+json", ProblemOut(), " or ".join(CODES[status]))
    answers |= more or {}
    operation: dict[str, Any] = {
        "summary": summary,
        "operationId": path.strip("/").replace("/", "-"),
        "responses": answers,
    }
    if body:
        operation["requestBody"] = _content("application/json", body, "") | {"required": True}
    spec.path(path, operations={method: operation})


def _content(media_type: str, schema: Schema, description: str) -> dict[str, Any]:
    return {"description": description, "content": {media_type: {"schema": schema}}}
