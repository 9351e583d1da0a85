"""Logs: one JSON line an event, and nobody's secret in any of them."""

import json
import logging
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

from memgw import logs
from memgw.errors import RemoteUnreachable, ToolFailed

REMOTE = "https://robot:p%40ss%22w%2Ford@git.example.com/memory.git"

Lines = Callable[[], list[dict[str, Any]]]


@pytest.fixture(autouse=True)
def _loggers() -> Iterator[None]:
    """Leaves the loggers as they were."""
    loggers = [logging.getLogger(name) for name in ("memgw", logs.REQUESTS)]
    before = [(logger.handlers[:], logger.propagate, logger.level) for logger in loggers]
    yield
    for logger, (handlers, propagate, level) in zip(loggers, before, strict=True):
        logger.handlers[:], logger.propagate, logger.level = handlers, propagate, level


@pytest.fixture
def lines(capsys: pytest.CaptureFixture[str]) -> Lines:
    """What went to stderr since the last look."""
    return lambda: [json.loads(line) for line in capsys.readouterr().err.split("\n")[:-1]]


def failed(argv: list[str], stderr: str) -> RemoteUnreachable:
    """An error as the gateway sees it, with the tool's at the bottom."""
    try:
        try:
            raise ToolFailed("ended with status 128", argv, stderr, 128)
        except ToolFailed as exc:
            raise RemoteUnreachable("the remote could not be reached") from exc
    except RemoteUnreachable as exc:
        return exc


def test_an_event_is_one_line_with_its_facts_as_fields(lines: Lines) -> None:
    logs.configure("INFO")
    before = datetime.now(UTC)
    logging.getLogger("memgw.workspace").info("synced", extra={"branch": "记忆\n", "documents": 3, "where": {"a": [1]}})
    [line] = lines()
    moment = datetime.fromisoformat(line.pop("time"))
    assert line == {
        "level": "INFO",
        "event": "synced",
        "logger": "memgw.workspace",
        "branch": "记忆\n",
        "documents": 3,
        "where": {"a": [1]},
    }
    assert abs((moment - before).total_seconds()) < 5
    assert moment.utcoffset() == before.utcoffset()


def test_an_event_of_several_lines_is_still_one(lines: Lines) -> None:
    logs.configure("INFO")
    logging.getLogger("memgw.x").warning("one\ntwo %s", "\u2028three")
    [line] = lines()
    assert line["event"] == "one\ntwo \u2028three"


def test_requests_go_to_stdout_and_events_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("WARNING")
    logging.getLogger(logs.REQUESTS).info("request", extra={"status": 200})
    logging.getLogger("memgw.x").info("not worth it")
    logging.getLogger("memgw.x").warning("healing")
    out, err = capsys.readouterr()
    assert [json.loads(line)["status"] for line in out.splitlines()] == [200]
    assert [json.loads(line)["event"] for line in err.splitlines()] == ["healing"]


def test_the_level_is_that_of_the_settings(lines: Lines) -> None:
    for level, events in (("DEBUG", ["d", "i"]), ("INFO", ["i"]), ("ERROR", [])):
        logs.configure(level)
        logging.getLogger("memgw.x").debug("d")
        logging.getLogger("memgw.x").info("i")
        assert [line["event"] for line in lines()] == events


def test_to_configure_twice_doubles_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("INFO")
    logs.configure("INFO")
    logging.getLogger(logs.REQUESTS).info("request")
    logging.getLogger("memgw.x").info("event")
    out, err = capsys.readouterr()
    assert (len(out.splitlines()), len(err.splitlines())) == (1, 1)


def test_what_json_does_not_know_is_written_as_text(lines: Lines) -> None:
    logs.configure("INFO")
    logging.getLogger("memgw.x").info("event", extra={"moment": datetime(2026, 3, 1, tzinfo=UTC)})
    assert lines()[0]["moment"] == "2026-03-01 00:00:00+00:00"


def test_a_line_carries_the_id_of_its_request(lines: Lines) -> None:
    logs.configure("INFO")
    logging.getLogger("memgw.x").info("outside")
    token = logs.request_id.set("id-7")
    try:
        logging.getLogger("memgw.x").info("inside")
    finally:
        logs.request_id.reset(token)
    outside, inside = lines()
    assert "request_id" not in outside
    assert inside["request_id"] == "id-7"


def test_a_failed_tool_is_told_with_its_arguments_and_the_end_of_what_it_said(lines: Lines) -> None:
    logs.configure("INFO")
    exc = failed(["git", "fetch", "--", "/srv/x"], "x" * 5000 + "the end")
    logging.getLogger("memgw.x").error("request failed", exc_info=exc)
    [line] = lines()
    assert line["argv"] == ["git", "fetch", "--", "/srv/x"]
    assert line["stderr"] == "x" * (2000 - len("the end")) + "the end"
    assert "RemoteUnreachable: the remote could not be reached" in line["trace"]
    assert "ToolFailed: ended with status 128" in line["trace"]


def test_an_error_without_a_tool_has_its_trace_only(lines: Lines) -> None:
    logs.configure("INFO")
    logging.getLogger("memgw.x").error("request failed", exc_info=KeyError("k"))
    [line] = lines()
    assert "KeyError: 'k'" in line["trace"]
    assert "argv" not in line


@pytest.mark.parametrize(
    ("text", "redacted"),
    [
        ("https://user:password@host/x", "https://***@host/x"),
        ("https://token@host/x", "https://***@host/x"),
        ("ssh://git:pw@host:22/x", "ssh://***@host:22/x"),
        ("https://user:p@ss@host/x", "https://***@host/x"),
        ("https://user:p%40ss@host/x", "https://***@host/x"),
        ("https://:pw@host/x", "https://***@host/x"),
        ("https://host/x?private_token=abc&y=1", "https://host/x?***"),
        ("https://host/x#access_token=abc", "https://host/x?***"),
        ("https://a:b@host/x?t=c", "https://***@host/x?***"),
        (
            "fatal: unable to access 'https://a:b@host/x?t=c': no",
            "fatal: unable to access 'https://***@host/x?***': no",
        ),
        ('"https://a:b@host/x?t=c", "next"', '"https://***@host/x?***", "next"'),
        ("two https://a:b@c/ and http://d:e@f/ in one", "two https://***@c/ and http://***@f/ in one"),
        ("git+ssh://a:b@host/x", "git+ssh://***@host/x"),
    ],
)
def test_urls_lose_users_passwords_and_tokens(text: str, redacted: str) -> None:
    assert logs.redact(text) == redacted


@pytest.mark.parametrize(
    "text",
    [
        "https://host/x.git", "git@host:team/x.git", "me@example.com", "a: b@c", "what? https://host/x and y@z",
        "/srv/a@b", "https://host/a@b/c", "",
    ],
)  # fmt: skip
def test_what_is_no_secret_is_left(text: str) -> None:
    assert logs.redact(text) == text


def test_secrets_that_are_known_go_wherever_they_stand() -> None:
    assert (
        logs.redact("Password for robot: hunter2; hunter22", ["hunter22", "hunter2"]) == "Password for robot: ***; ***"
    )


@pytest.mark.parametrize(
    ("url", "secrets"),
    [
        ("https://robot:hunter2@host/x", ["hunter2", "robot"]),
        ("https://robot:p%40ss@host/x", ["p%40ss", "robot", "p@ss"]),
        ("https://ghp_token@host/x", ["ghp_token"]),
        ("https://robot:p@ss@host/x", ["robot", "p@ss"]),
        ("ssh://git:hunter2@host/x", ["hunter2"]),
        ("ssh://git@host/x", []),
        ("git@host:x", []),
        ("/srv/x.git", []),
        ("https://host/x", []),
        ("https://me:abc@host/x", []),
        ("https://[::1/x", []),
    ],
)
def test_the_secrets_of_a_remote_are_its_password_and_a_user_that_may_be_a_token(url: str, secrets: list[str]) -> None:
    assert sorted(logs.secrets_of(url)) == sorted(secrets)


def test_a_longer_secret_is_looked_for_first() -> None:
    assert logs.secrets_of("https://abcd:abcdef@host/x") == ["abcdef", "abcd"]


@pytest.mark.parametrize("form", ["p%40ss%22w%2Ford", 'p@ss"w/ord'])
def test_no_form_of_a_password_gets_into_a_line(lines: Lines, form: str) -> None:
    logs.configure("INFO", logs.secrets_of(REMOTE))
    exc = failed(["git", "fetch", f"--password={form}", REMOTE], f"denied for {form}")
    logger = logging.getLogger("memgw.x")
    logger.error("said %s", form, exc_info=exc, extra={"fact": form, "list": [form], "map": {form: form}})
    logger.error("trace", exc_info=KeyError(f"in the trace: {form}"))
    first, second = lines()
    for text in (*first["argv"], first["stderr"], first["event"], first["fact"], str(first), str(second)):
        assert form not in text
        assert "w%2Ford" not in text
        assert "w/ord" not in text
    assert first["event"] == "said ***"
    assert first["argv"] == ["git", "fetch", "--password=***", "https://***@git.example.com/memory.git"]
    assert first["stderr"] == "denied for ***"


def test_a_secret_that_is_a_common_word_leaves_the_line_a_line(lines: Lines) -> None:
    logs.configure("INFO", logs.secrets_of("https://level:event@host/x"))
    logging.getLogger("memgw.x").info("the event", extra={"branch": "main"})
    [line] = lines()
    assert line["level"] == "INFO"
    assert line["event"] == "the ***"
    assert line["branch"] == "main"
