"""Every way to fail, as HTTP: one table, one shape (RFC 9457, application/problem+json)."""

import logging
from http import HTTPStatus
from typing import Any

from flask import Flask, Response, current_app, g, request
from werkzeug.exceptions import HTTPException

from memgw import errors
from memgw.logs import request_id

log = logging.getLogger(__name__)

TABLE: dict[type[errors.MemgwError], tuple[int, str]] = {
    errors.InvalidBranch: (422, "invalid_branch"),
    errors.InvalidProfile: (422, "invalid_profile"),
    errors.BranchNotFound: (404, "branch_not_found"),
    errors.RemoteUnreachable: (502, "remote_unreachable"),
    errors.RemoteAuthFailed: (502, "remote_auth_failed"),
    errors.CommitUnusable: (502, "commit_unusable"),
    errors.EngineFailed: (502, "engine_failed"),
    errors.EngineMissing: (502, "engine_failed"),
    errors.HostAway: (502, "engine_failed"),
    errors.EngineBadOutput: (502, "engine_bad_output"),
    errors.NotAsAsked: (503, errors.EngineError.code),
    errors.ModelUnavailable: (503, errors.ModelUnavailable.code),
    errors.VectorsPending: (503, errors.VectorsPending.code),
    errors.BudgetExceeded: (503, errors.BudgetExceeded.code),
    errors.EngineError: (503, errors.EngineError.code),
    errors.WorkspaceBusy: (503, "workspace_busy"),
    errors.DeadlineExceeded: (504, "deadline_exceeded"),
    errors.StorageFull: (507, "storage_full"),
    errors.HooksOff: (404, "hooks_off"),
    errors.HookUnauthorized: (401, "hook_unauthorized"),
    errors.HookReplayed: (409, "hook_replayed"),
    errors.Damaged: (500, "internal_error"),
    errors.MirrorDamaged: (500, "internal_error"),
    errors.WorktreeDamaged: (500, "internal_error"),
    errors.IndexDamaged: (500, "internal_error"),
}

HTTP_CODES = {
    400: "invalid_json",
    404: "not_found",
    405: "method_not_allowed",
    413: "body_too_large",
    415: "unsupported_media_type",
    500: "internal_error",
}

CODES: dict[int, list[str]] = {}
for _status, _code in [*TABLE.values(), *HTTP_CODES.items(), (422, "validation_failed")]:
    if _code not in CODES.setdefault(_status, []):
        CODES[_status].append(_code)

_PHRASES = {int(status): status.phrase for status in HTTPStatus}

_INTERNAL = "something went wrong in the gateway; its log has more under this request id"


class ValidationFailed(Exception):
    """`errors`: field → what is wrong with it."""

    def __init__(self, errors: dict[str, list[str]]) -> None:
        super().__init__("the request is not valid")
        self.errors = errors


def code_of(error_name: str) -> str:
    """The code that clients know an error class by."""
    return next((code for kind, (_, code) in TABLE.items() if kind.__name__ == error_name), "internal_error")


def problem(status: int, code: str, detail: str, **more: Any) -> Response:
    """An answer of the one shape that all failures have."""
    body = {
        "ok": False,
        "status": status,
        "code": code,
        "title": _PHRASES.get(status, "Error"),
        "detail": detail,
        "request_id": request_id.get(),
        **more,
    }
    g.code = code
    return Response(
        current_app.json.dumps(body, separators=(",", ":")) + "\n", status, content_type="application/problem+json"
    )


def init_app(app: Flask) -> None:
    """Answers our errors, invalid requests, HTTP's own, and whatever else is raised."""

    @app.errorhandler(errors.MemgwError)
    def ours(exc: errors.MemgwError) -> Response:
        status, code = TABLE[type(exc)]
        if status >= 500:
            log.error("request failed", extra={"code": code}, exc_info=exc)
        if status == 500:
            return problem(status, code, _INTERNAL)
        fields = {errors.InvalidBranch: "branch", errors.InvalidProfile: "memory_profile"}
        more = {"errors": {fields[type(exc)]: [exc.detail]}} if type(exc) in fields else {}
        answer = problem(status, code, exc.detail, **more)
        if isinstance(exc, errors.WorkspaceBusy):
            answer.headers["Retry-After"] = str(exc.retry_after)
        return answer

    @app.errorhandler(ValidationFailed)
    def invalid(exc: ValidationFailed) -> Response:
        return problem(422, "validation_failed", str(exc), errors=exc.errors)

    @app.errorhandler(HTTPException)
    def http(exc: HTTPException) -> Response:
        status = exc.code or 500
        if status < 400:
            return Response(exc.get_body(), status, exc.get_headers())
        if status == 413:
            _drain()
        code = HTTP_CODES.get(status, exc.name.lower().replace(" ", "_"))
        answer = problem(status, code, _INTERNAL if status == 500 else exc.description or exc.name)
        for name, value in exc.get_headers():
            if name not in ("Content-Type", "Content-Length"):
                answer.headers[name] = value
        return answer


def _drain(at_most: int = 4 * 1024 * 1024) -> None:
    """Reads on what a client is still sending: closing on unread data would reset the connection, and the client
    would not see why."""
    while at_most > 0 and (piece := request.environ["wsgi.input"].read(min(65_536, at_most))):
        at_most -= len(piece)
