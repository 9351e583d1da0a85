"""The tree of errors, and the table that turns it into HTTP, have to be complete."""

import errno
import inspect
import re
from typing import TypeVar

import pytest

from memgw import errors, problems
from memgw.errors import MemgwError, StorageFull, ToolError, ToolFailed, storage_full_translated

Kind = TypeVar("Kind", bound=Exception)

# what DESIGN.md promises to clients
DOCUMENTED = {
    400: {"invalid_json"},
    401: {"hook_unauthorized"},
    404: {"branch_not_found", "not_found", "hooks_off"},
    405: {"method_not_allowed"},
    409: {"hook_replayed"},
    413: {"body_too_large"},
    415: {"unsupported_media_type"},
    422: {"validation_failed", "invalid_branch", "invalid_profile"},
    500: {"internal_error"},
    502: {"remote_unreachable", "remote_auth_failed", "engine_failed", "engine_bad_output", "commit_unusable"},
    503: {"workspace_busy", "model_unavailable", "vectors_pending", "budget_exceeded", "engine_error"},
    504: {"deadline_exceeded"},
    507: {"storage_full"},
}


def family(base: type[Kind]) -> set[type[Kind]]:
    """All classes below `base` that are memgw's own."""
    below = {kind for kind in base.__subclasses__() if kind.__module__.startswith("memgw.")}
    return below.union(*(family(kind) for kind in below))


def test_every_error_of_ours_has_a_documented_status_and_code() -> None:
    assert set(problems.TABLE) == family(MemgwError)
    for kind, (status, code) in problems.TABLE.items():
        assert code in DOCUMENTED[status], kind


def test_tool_errors_have_no_answer_since_none_may_get_that_far() -> None:
    answered: set[type[Exception]] = set(problems.TABLE)
    assert answered.isdisjoint({ToolError} | family(ToolError))
    assert not issubclass(ToolError, MemgwError)


def test_what_can_be_answered_is_what_is_documented() -> None:
    assert {status: set(codes) for status, codes in problems.CODES.items()} == DOCUMENTED
    assert all(len(set(codes)) == len(codes) for codes in problems.CODES.values())


def test_a_signal_that_escapes_is_a_fault_of_ours() -> None:
    for kind in {errors.Damaged} | family(errors.Damaged):
        assert issubclass(kind, MemgwError)
        assert problems.TABLE[kind] == (500, "internal_error")


def test_a_noted_error_is_told_by_the_code_that_clients_know() -> None:
    for kind, (_, code) in problems.TABLE.items():
        assert problems.code_of(kind.__name__) == code
    assert problems.code_of("KeyError") == "internal_error"


def test_the_tree_in_the_docstring_is_the_tree_of_the_classes() -> None:
    drawn: dict[str, str] = {}
    above: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        found = re.match(r" {4}([│ ]*(?:[├└]── )?)([A-Z]\w+)\b", line)
        if found:
            depth = len(found[1]) // 4
            above[depth:] = [found[2]]
            if depth:
                drawn[found[2]] = above[depth - 1]
    real = {kind.__name__: kind.__bases__[0].__name__ for kind in family(MemgwError) | family(ToolError)}
    assert drawn == real


def test_an_error_says_what_a_client_may_read() -> None:
    assert str(MemgwError("the detail")) == MemgwError("the detail").detail == "the detail"
    busy = errors.WorkspaceBusy("busy", 5)
    assert (busy.detail, busy.retry_after) == ("busy", 5)


def test_a_tools_words_stay_out_of_its_message() -> None:
    failed = ToolFailed("ended with status 3", ["git", "secret-argument"], "secret-words", 3)
    assert str(failed) == "ended with status 3"
    assert (failed.argv, failed.stderr, failed.status) == (["git", "secret-argument"], "secret-words", 3)


@pytest.mark.parametrize(
    "said",
    [
        "fatal: write error: No space left on device",
        "error: unable to write file x: No space left on device\n",
        "Error: ENOSPC: no space left on device, write",
        "Error: write ENOSPC",
        "SqliteError: database or disk is full",
        "Error: EDQUOT: disk quota exceeded, write",
        "error: unable to create file a.md: Disk quota exceeded",
    ],
)
def test_a_tool_that_had_no_space_is_understood(said: str) -> None:
    assert ToolError("failed", ["x"], said).disk_is_full


@pytest.mark.parametrize("said", ["", "fatal: not a git repository", "disk I/O error", "the disk is fine"])
def test_other_failures_are_not_taken_for_a_full_disk(said: str) -> None:
    assert not ToolError("failed", ["x"], said).disk_is_full


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_no_space_is_told_as_such(number: int) -> None:
    full = OSError(number, "full")
    with pytest.raises(StorageFull) as caught, storage_full_translated():
        raise full
    assert caught.value.__cause__ is full


def test_other_errors_of_the_system_pass_as_they_are() -> None:
    denied = PermissionError(errno.EACCES, "denied")
    with pytest.raises(PermissionError) as caught, storage_full_translated():
        raise denied
    assert caught.value is denied


def test_errors_know_nothing_of_http() -> None:
    assert not re.search(r"\b[45]\d\d\b|flask|werkzeug|status code", inspect.getsource(errors), re.IGNORECASE)
