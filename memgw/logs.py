"""Logs: one JSON line for each request on stdout, and one for each event on stderr, beside gunicorn's own."""

import json
import logging
import re
import sys
from collections.abc import Iterable
from contextvars import ContextVar
from datetime import UTC, datetime
from urllib.parse import unquote, urlsplit

from memgw.errors import ToolError

REQUESTS = "memgw.request"

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""Set by the HTTP layer; every line logged while a request runs carries it."""

_USERINFO = re.compile(r"(\w+://)[^/\s]+@")
_QUERY = re.compile(r"(\w+://[^\s?#'\"]+)[?#][^\s'\"]+")
_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


def redact(text: str, secrets: Iterable[str] = ()) -> str:
    """`text` without what URLs carry of users, passwords and tokens, and without `secrets`."""
    for secret in secrets:
        text = text.replace(secret, "***")
    return _QUERY.sub(r"\1?***", _USERINFO.sub(r"\1***@", text))


def secrets_of(url: str) -> list[str]:
    """The password and the user of a remote's URL when they may be tokens, in each form that a tool may print."""
    try:
        parts = urlsplit(url)
        found = [parts.password, parts.username if parts.scheme in ("http", "https") else None]
    except ValueError:
        return []
    forms = {form for secret in found if secret and len(secret) > 3 for form in (secret, unquote(secret))}
    return sorted(forms, key=len, reverse=True)


class JsonLines(logging.Formatter):
    """Facts as fields; never a secret, wherever in the record it stands."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        super().__init__()
        self._secrets = list(secrets)

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, object] = {
            "time": moment,
            "level": record.levelname,
            "event": record.getMessage(),
            "logger": record.name,
        }
        if request_id.get():
            line["request_id"] = request_id.get()
        line |= {key: value for key, value in record.__dict__.items() if key not in _STANDARD}
        if record.exc_info:
            line |= _tool_facts(record.exc_info[1], self._secrets)
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps({name: self._redacted(value) for name, value in line.items()}, ensure_ascii=False)

    def _redacted(self, value: object) -> object:
        """Before it becomes JSON, whose escapes could hide a secret; names of fields stay as they are."""
        match value:
            case bool() | int() | float() | None:
                return value
            case dict():
                return {redact(str(key), self._secrets): self._redacted(inner) for key, inner in value.items()}
            case list() | tuple():
                return [self._redacted(inner) for inner in value]
            case _:
                return redact(str(value), self._secrets)


def _tool_facts(exc: BaseException | None, secrets: list[str]) -> dict[str, object]:
    """What the tool at the bottom of a chain of exceptions was and said."""
    while exc is not None:
        if isinstance(exc, ToolError):
            return {"argv": exc.argv, "stderr": redact(exc.stderr, secrets)[-2000:]}
        exc = exc.__cause__
    return {}


def configure(level: str, secrets: Iterable[str] = ()) -> None:
    """Sends requests to stdout and the rest of memgw's events to stderr."""
    secrets = list(secrets)
    for name, stream in (("memgw", sys.stderr), (REQUESTS, sys.stdout)):
        logger = logging.getLogger(name)
        handler = logging.StreamHandler(stream)
        handler.setFormatter(JsonLines(secrets))
        logger.handlers[:] = [handler]
        logger.propagate = False
        logger.setLevel(level)
    logging.getLogger(REQUESTS).setLevel(logging.INFO)
